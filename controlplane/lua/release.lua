-- Gives a lease back, if it is ours.
-- ARGV: prefix, name of the lease, holder
local key = ARGV[1] .. ARGV[2]
if redis.call('GET', key) == ARGV[3] then
  redis.call('DEL', key)
end
return 1
