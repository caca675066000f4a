"""Find documents, lines and spans that occur more than once, and remove all copies but one."""
