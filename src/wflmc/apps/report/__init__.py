"""What people see: figures, pages, and tables in words."""
