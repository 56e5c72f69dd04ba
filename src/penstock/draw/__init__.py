"""Timelines as text, SVG, PNG, HTML and Perfetto traces."""
