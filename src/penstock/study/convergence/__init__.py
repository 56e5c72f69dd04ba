"""The study of convergence: which weight rules lose accuracy, and when?"""
