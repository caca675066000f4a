"""Tokenizers, and documents as rows of token ids."""
