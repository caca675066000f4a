"""Where outputs come from: what each tells about its run, and the graph of all of them."""
