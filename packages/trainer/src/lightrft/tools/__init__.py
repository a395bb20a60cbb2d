"""Programs beside training; the core never imports them."""
