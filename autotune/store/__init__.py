"""SQL: tables, migrations, queries."""
