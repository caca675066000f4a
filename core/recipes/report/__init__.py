"""Where training tokens are from, and what became of documents (`sabia report`)."""
