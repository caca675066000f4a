"""Score documents, filter them by scores, and train and calibrate the scorers."""
