"""Items of tasks that a corpus holds: scores apart, and what tells that a model has read them."""
