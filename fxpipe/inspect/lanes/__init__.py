"""What a plan is made of, as a picture: stages as lanes of modules, portals as arcs."""
