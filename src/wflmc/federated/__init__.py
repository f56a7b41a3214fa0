"""A real federation on Flower: the server holds θ, the plan and the ledger, each device its own data."""
