"""Find benchmark items in training documents and remove or mark them."""
