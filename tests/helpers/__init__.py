"""Models, oracles and stand-ins that several tests share."""
