"""Distillation from records: the predictions of a teacher, written once and trained on."""
