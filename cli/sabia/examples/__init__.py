"""What the examples run: sabia.examples.little_web, the web site of the quickstart."""
