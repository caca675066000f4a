"""The rooms of sabia; DESIGN of the house is told in the README."""
