"""What people look at: tables, pictures and a page, all drawn from a results document."""
