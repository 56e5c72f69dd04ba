"""Models, data and settings that users give by name, by file or in code."""
