"""What holds of the repository as a whole: installs, pins, commands, documents."""
