"""Run layers and links, and write down what they cost."""
