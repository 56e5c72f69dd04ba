"""What will it cost? Programs and costs to events."""
