"""Timelines as text, SVG, HTML and Perfetto traces."""
