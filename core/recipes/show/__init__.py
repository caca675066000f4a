"""Rows as a person reads them (`sabia show`)."""
