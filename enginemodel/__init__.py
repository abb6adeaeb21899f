"""What one engine step costs: formulas and reference constants, pure, shared by every part."""
