"""How values get from rank to rank."""
