"""Reports: tables, figures, curves and timelines as one HTML file, as Markdown and as CSV."""
