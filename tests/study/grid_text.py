"""The grid of cells that tests of YAML files share."""

GRID = """
system: [torch, penstock]
schedule: [1f1b, gpipe]
stages: [2, 4]
micro_batches: 4
model: mlp
model_options: {layers: 6}
data: random
batch: 32
steps: 3
exclude:
  - {system: torch, schedule: gpipe}
"""
