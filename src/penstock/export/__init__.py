"""Plans and schedules in the forms of other libraries."""
