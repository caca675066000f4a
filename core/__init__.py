"""The packages of sabia; the README describes each of them."""
