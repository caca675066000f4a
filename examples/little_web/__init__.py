"""The quickstart's generated little web."""
