"""The array operations of models: one interface (`base`), two backends, one chain of products."""
