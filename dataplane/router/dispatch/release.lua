-- Gives a lease up that is still ours. KEYS[1] the lease, ARGV[1] our value.
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
