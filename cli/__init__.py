"""The commands: one thin file each, over the packages of sabia.core."""
