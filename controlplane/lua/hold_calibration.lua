-- Takes the calibration lock if it is free, extends it if it is ours; returns who holds it.
-- ARGV: prefix, holder, lease in ms
local key = ARGV[1] .. 'calibration'
local owner = redis.call('GET', key)
if owner and owner ~= ARGV[2] then
  return owner
end
redis.call('SET', key, ARGV[2], 'PX', ARGV[3])
return ARGV[2]
