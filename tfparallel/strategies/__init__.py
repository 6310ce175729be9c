"""The strategies that users construct, one file each: arguments, and what they are composed of."""
