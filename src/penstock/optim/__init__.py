"""Update of a stage's weights."""
