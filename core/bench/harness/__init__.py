"""Task files of lm-evaluation-harness: what they hold, the prompts and the scores they give."""
