"""What a model will do on a device, from its config.json and data sheets, before anything is downloaded or loaded."""
