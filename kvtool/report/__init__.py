"""Tables, pictures and a page, all drawn from a results document."""
