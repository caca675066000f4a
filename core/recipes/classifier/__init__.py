"""Classifiers of documents: training, distillation from a language model, scoring."""
