"""One device of a layout: its memory term by term, its step time, and the search over layouts."""
