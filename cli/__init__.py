"""The commands: one thin file each, over the rooms of sabia.core."""
