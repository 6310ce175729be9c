"""Parameter servers: roles, placement of variables, and updates that workers hand in one by one."""
