"""How the flows get to a Prefect server and its work pools. Run from the checkout, not installed."""
