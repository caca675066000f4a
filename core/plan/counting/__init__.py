"""Parameters and operations: of a counted architecture, or assumed from bare numbers."""
