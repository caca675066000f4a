"""An answer in the forms it is asked for: table, JSON, rows, remarks, plots, launch files."""
