"""How a controller reaches the agents of its job."""
