"""What was generated before: each prompt's last responses, rewards and lengths, and the index drafts come from."""
