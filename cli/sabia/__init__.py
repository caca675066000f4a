"""The package at the top: sabia.cli, sabia.core and sabia.kernels are installed below it."""
