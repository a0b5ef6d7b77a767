"""Pure decisions about what stays where."""
