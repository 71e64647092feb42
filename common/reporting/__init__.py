"""Tables and plots, from records; what has no record yet is projected, and says so."""
