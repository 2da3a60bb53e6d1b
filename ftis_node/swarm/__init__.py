"""The swarm: peers, their announcements, and the checks before a packet enters this node."""
