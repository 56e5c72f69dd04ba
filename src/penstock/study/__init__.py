"""What was asked, what came of it, and what that says: questions, records, statistics, conclusions,
figures.
"""
